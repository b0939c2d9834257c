"""The tables of quantized values."""

import hashlib

import numpy as np

from jaxspeed.quantization.maps import TABLES, dynamic_map

MAPS = {
    **TABLES,
    "signed": dynamic_map(),
    "unsigned": dynamic_map(signed=False),
    "six exponents": dynamic_map(max_exponent_bits=6),
}


def test_the_tables_are_those_of_bitsandbytes(references):
    for name, table in references.call("bnb.tables").items():
        assert table.dtype == MAPS[name].dtype == np.float32
        np.testing.assert_array_equal(table.view(np.int32), MAPS[name].view(np.int32), name)


def test_the_bits_of_the_tables_do_not_change():
    """Without bitsandbytes: a checkpoint's codes are indices into them."""
    bits = {name: hashlib.sha256(x.tobytes()).hexdigest()[:16] for name, x in MAPS.items()}
    assert bits == {
        "nf4": "8501941daa1b8a90",
        "fp4": "b830bcf8857895e5",
        "signed": "e732639a65f497b4",
        "unsigned": "305f002cc11278fb",
        "six exponents": "289ddc501978c682",
    }
