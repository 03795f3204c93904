"""Layouts from outside pass what ours pass; one that rounds numbers does so within what it states."""

import pytest

from pallas_kernels.layouts import LAYOUTS
from tests.engine import test_layouts as of_engine
from tests.kernels import test_layouts as of_kernels
from tests.outsiders.layout import ColumnsOfK, SixBits

OWN = {"columns_of_k": ColumnsOfK(), "six_bits": SixBits()}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, layout in OWN.items():
        monkeypatch.setitem(LAYOUTS, name, layout)


@pytest.mark.parametrize("name", [pytest.param("columns_of_k", marks=pytest.mark.slow), "six_bits"])
def test_it_passes_what_ours_pass(name):
    of_kernels.test_a_layout_writes_reads_and_copies_as_its_oracle(name)
    of_kernels.test_a_pool_takes_the_bytes_of_its_blocks_and_is_written_in_place(name)
    for operation in ("decode", "v1", "v2"):
        of_kernels.test_decode_attention_reads_every_layout(name, operation)
    of_kernels.tiles_of(*of_kernels.filled(name), "xla")


@pytest.mark.nightly
@pytest.mark.parametrize("name", OWN)
def test_the_engine_serves_it_by_its_words(name):
    of_engine.check_tokens(f"tests.outsiders.layout:{type(OWN[name]).__name__}", OWN[name])
