"""Generate text with a model that train_gpt.py saved. Needs only torch, not zlaunch.

python examples/sample.py out/pytorch_model.bin --size tiny
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args()

    size = SIZES[args.size]
    model = GPT(size)
    model.load_state_dict(torch.load(args.weights, weights_only=True))
    model.eval()
    torch.manual_seed(0)
    text = torch.tensor([list(args.prompt.encode())])
    with torch.no_grad():
        for _ in range(args.length):
            logits = model(text[:, -size.context :])[0, -1].float()
            chosen = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1)
            text = torch.cat([text, chosen[None]], dim=1)
    print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
