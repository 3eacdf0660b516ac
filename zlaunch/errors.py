"""Define the errors that users may catch. Imports nothing, so that everything may import it."""


class ZlaunchError(Exception):
    """Is the base of every error that zlaunch raises on purpose."""


class LaunchError(ZlaunchError):
    """Says what the user got wrong about a launch, and what to do; the command exits with code 2."""


class NodeError(LaunchError):
    """Says why a node cannot take part and what to do; the host is named beside the text."""

    def __init__(self, host: str, text: str, slots: tuple[int, ...] = ()) -> None:
        """Take the slots that are to blame; none: the host as a whole."""
        super().__init__(text)
        self.host = host
        self.text = text
        self.slots = slots
