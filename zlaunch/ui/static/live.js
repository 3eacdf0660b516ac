"use strict";
// Ask for the page's <main> again and again, and put the new one in the old one's place.
const main = document.querySelector("main");
const standing = document.getElementById("standing");
const find = document.getElementById("find");
let seen = "", seconds = Number(main.dataset.poll);

function filter() {
  const words = find ? find.value.toLowerCase().split(/\s+/) : [];
  for (const row of main.querySelectorAll("tr[data-name]")) {
    const name = row.dataset.name.toLowerCase();
    row.hidden = !words.every(word => name.includes(word));
  }
}

function replace(text) {
  const chosen = new Set([...main.querySelectorAll("input:checked")].map(box => box.value));
  const open = [...main.querySelectorAll("details")].map(each => each.open);
  main.innerHTML = text;
  for (const box of main.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
  main.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(open[index]); });
  filter();
}

async function look() {
  const address = new URL(location.href);
  address.searchParams.set("part", "main");
  try {
    const answer = await fetch(address, {cache: "no-store"});
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const text = await answer.text();
    if (text !== seen) replace(text);
    seen = text;
    seconds = Number(answer.headers.get("x-poll"));
    standing.textContent = "";
  } catch (error) {
    standing.textContent = `not updated: ${error.message}. Is zlaunch ui still running?`;
  }
}

async function follow() {
  while (seconds > 0) {
    await new Promise(done => setTimeout(done, seconds * 1000));
    // A page in the background, and one of which something is being copied, waits.
    if (!document.hidden && !String(getSelection())) await look();
  }
}

if (find) find.addEventListener("input", filter);
follow();
