"""What accelerate looks up, and the command."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(args: list[str] | None = None) -> int:
    """Run ``zlaunch`` with these arguments."""
    from zlaunch.cli.main import main as zlaunch_main

    return zlaunch_main(args)
