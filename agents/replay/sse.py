"""Server-sent events from bytes that are cut anywhere. Only `data` is kept; nothing else has a meaning."""

_LIMIT = 256 * 1024 * 1024  # bytes of one event; routing records of long turns are tens of MB


class EventTooLong(Exception):
    """One event is larger than anything an engine sends."""


class Events:
    """The events of one body. Lines may end in LF, CRLF or CR."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order; raises EventTooLong."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = self._plain(data)
        if data.startswith(b"data: ") and data.endswith(b"\n\n"):
            events = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(events):  # nothing but lines of data, each an event
                self._rest = b""
                return events
        *whole, self._rest = data.split(b"\n\n")
        if len(self._rest) > _LIMIT:
            raise EventTooLong(f"an event of more than {_LIMIT} bytes")
        return [found for event in whole if (found := _data_of(event)) is not None]

    def _plain(self, data: bytes) -> bytes:
        """`data` with LF only. A CR at its end may be half of a CRLF, so it stays until more comes."""
        held = b"\r" if data.endswith(b"\r") else b""
        plain = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return plain + held


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
