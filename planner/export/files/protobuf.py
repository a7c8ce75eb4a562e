"""The wire format of protocol buffers, as far as foreign files are read here: fields, by their numbers.

    tag = number << 3 | kind        kind 0: a varint, 7 bits a byte, the lowest first; a negative number is that + 2^64
                                    kind 1: 8 bytes      kind 5: 4 bytes      kind 2: a length, and so many bytes

The meaning of a field is in the schema, which the reader has. Nothing is built from names in a file.
(https://protobuf.dev/programming-guides/encoding/)
"""

from collections.abc import Iterator

from hardware_profiles.foreign import ForeignTextError

Value = int | bytes

MOST = 2**20
"""The most fields of a message; a file about a model has far fewer."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST = 10  # bytes of a varint of 64 bits


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message in their order: (number, value), a signed 64-bit integer or the bytes as they are.

    Raises ForeignTextError, with the place, if it is not a message.
    """
    at = count = 0
    while at < len(message):
        tag, start = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        count += 1
        if number < 1 or count > MOST:
            what = f"more than {MOST} fields" if number else f"a field without a number at byte {at}"
            raise ForeignTextError(f"not a protocol buffer: it has {what}")
        if kind == _VARINT:
            value, at = _varint(message, start)
            yield number, value - 2**64 if value >= 2**63 else value
            continue
        length = {_EIGHT: 8, _FOUR: 4}.get(kind)
        if kind == _BYTES:
            length, start = _varint(message, start)
        if length is None or start + length > len(message):
            raise ForeignTextError(
                f"not a protocol buffer: the field at byte {at} ends behind the file, or has no kind"
            )
        at = start + length
        yield number, message[start:at]


def integers(value: Value) -> list[int]:
    """The numbers of a repeated field: a single one, or several packed ones."""
    if isinstance(value, int):
        return [value]
    found, at = list[int](), 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number - 2**64 if number >= 2**63 else number)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and the position after it."""
    found = 0
    for place, byte in enumerate(message[at : at + _LONGEST]):
        found |= (byte & 127) << 7 * place
        if byte < 128:
            return found & (2**64 - 1), at + place + 1
    raise ForeignTextError(f"not a protocol buffer: the number at byte {at} does not end")
