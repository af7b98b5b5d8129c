"""What can go wrong with the demo itself."""

from relight.events.errors import RelightError


class DemoFailed(RelightError):
    """The demo could not be played to its end; the message says what did not come, and where to look."""
