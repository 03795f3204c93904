"""Only calls of the list are made in other processes."""

import pytest

from jaxpaged.checks import InputError
from jaxpaged.engine import device
from jaxpaged.parallel.calls import SharedCalls

CALLS = SharedCalls("write")


class Writer:
    send_call = None

    def __init__(self):
        self.written = []

    @CALLS.shared
    def write(self, value):
        self.written.append(value)

    def erase(self):
        self.written = []


def test_a_shared_call_is_sent_to_the_others_and_made_there():
    here, there = Writer(), Writer()
    here.send_call = lambda name, arrays: CALLS.make(there, name, arrays)
    here.write(7)
    assert here.written == there.written == [7]


@pytest.mark.parametrize("name", ["erase", "__init__", "no such"])
def test_no_other_method_can_be_called(name):
    writer = Writer()
    writer.write(7)
    with pytest.raises(InputError, match=f"call='{name}' must be one of write"):
        CALLS.make(writer, name, [])
    assert writer.written == [7]


def test_a_method_that_is_not_in_the_list_cannot_be_shared():
    with pytest.raises(ValueError, match="name='erase' must be one of write"):
        CALLS.shared(Writer.erase)


def test_every_call_of_the_devices_list_is_a_shared_method():
    assert all(hasattr(getattr(device.Device, name), "__wrapped__") for name in device.CALLS.names)
