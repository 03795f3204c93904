"""Formats of strings as regular expressions: each text of one is valid, and in a common form of it."""

_DAY = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_DATE = _DAY.replace(r"\d{4}", r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})", 1).replace(
    "[02468][048]|", "0[48]|[2468][048]|", 1
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9])*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-%s[0-9a-fA-F]{3}-[0-9a-fA-F]{12}"


def _ipv6() -> str:
    alternatives = [rf"(?:{_GROUP}:){{7}}{_GROUP}"]
    for before in range(8):
        left = "" if before == 0 else rf"{_GROUP}(?::{_GROUP}){{{before - 1}}}"
        after = 7 - before
        right = "" if after == 0 else rf"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?"
        alternatives.append(f"{left}::{right}")
    return "|".join(alternatives)


def _duration() -> str:
    seconds = r"\d+S"
    minutes = rf"\d+M(?:{seconds})?"
    time = rf"T(?:\d+H(?:{minutes})?|{minutes}|{seconds})"
    months = r"\d+M(?:\d+D)?"
    return rf"P(?:(?:\d+D|{months}|\d+Y(?:{months})?)(?:{time})?|{time}|\d+W)"


def _uri() -> str:
    letter = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
    user = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|%[0-9A-Fa-f]{2})*@"
    name = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*"
    path = rf"{letter}+(?:/{letter}*)*"
    place = rf"//(?:{user})?{name}(?::\d{{1,5}})?(?:/{letter}*)*|/(?:{path})?|{path}"
    return rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{place})?(?:\?(?:{letter}|[/?])*)?(?:#(?:{letter}|[/?])*)?"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"(?:{_DATE})T{_TIME}",
    "duration": _duration(),
    "uuid": _UUID % ("[0-9a-fA-F]", "[0-9a-fA-F]"),
    **{f"uuid{version}": _UUID % (version, "[89abAB]") for version in "134567"},
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "hostname": _HOST,
    "email": r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+)*@" + _HOST,
    "uri": _uri(),
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}
MAX_LENGTHS = {"hostname": 63, "email": 127}  # so that no name or part of one is too long
"""Characters of a format's longest text, where it has one."""
