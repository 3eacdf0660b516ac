"""Which scripts declare --local_rank, so that sys.argv has it."""

from __future__ import annotations

import pytest

from zlaunch.node.local_rank_option import spelling_in


@pytest.mark.parametrize(
    "text",
    [
        'parser.add_argument("--local_rank", type=int, default=-1)',
        "parser.add_argument('--local-rank', '--local_rank')",
        "@click.option('--local_rank', type=int)\ndef main(): ...",
        'flags.DEFINE_integer("local_rank", -1, "")',
        'getopt.getopt(sys.argv[1:], "", ["local_rank=", "epochs="])',
        'rank = [a for a in sys.argv if a.startswith("--local_rank=")]',
        'rank = [a for a in sys.argv if "local_rank" in a]',
        "import fire\ndef train(steps: int, local_rank: int = -1, dtype: str = 'bf16'): ...",
        "from fire import Fire\ndef train(local_rank, epochs=1): ...",
        "import tyro.conf\nclass Args:\n    local_rank: Optional[int] = None\n",
        "import tyro\nclass Args:\n    local_rank: int = field(default=-1)\n",
    ],
)
def test_a_script_that_knows_the_option_declares_it(text: str) -> None:
    assert spelling_in(text.encode()) == "--local_rank"


def test_the_other_spelling_is_kept() -> None:
    text = b"@click.option('--local-rank', envvar='LOCAL_RANK')\ndef main(local_rank): print('local_rank')"
    assert spelling_in(text) == "--local-rank"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print('x')",
        'local_rank = int(os.environ["LOCAL_RANK"])',
        "local_rank = 0",
        "ddp_local_rank: int = -1",
        "setup(local_rank=0)",
        "config.local_rank",
        'parser.add_argument("--local_ranks")',
        "# torch.distributed.launch passed --local_rank",
        '"""Needs no --local_rank."""',
        "os.system(f'python t.py --local_rank={i}')",
        "def setup(local_rank): ...",
        "info = {'local_rank': int(os.environ['LOCAL_RANK'])}",
        "class Dist:\n    local_rank: int = 0",
        "import fire\ndef setup(local_rank): ...\nsetup(int(os.environ['LOCAL_RANK']))",
        "not Python (--local_rank",
    ],
)
def test_a_script_for_torchrun_does_not(text: str) -> None:
    assert spelling_in(text.encode()) == ""
