"""What a model file recommends: llama.cpp's keys, nothing believed that cannot be."""

import pytest

from pyggml_spec.sampling.recommended import recommended
from pyggml_spec.sampling.sampler import Sampling


def test_what_the_converter_writes():
    keys = {
        "temp": 0.6000000238418579,
        "top_k": 20,
        "top_p": 0.949999988079071,
        "min_p": 0.0,
        "penalty_repeat": 1.0499999523162842,
        "penalty_last_n": 64,
    }
    values, refused = recommended({f"general.sampling.{key}": value for key, value in keys.items()} | {"general.name": "x"})
    assert (
        values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repeat_penalty": 1.05, "repeat_last_n": 64}
        and not refused
    )
    assert recommended({"general.name": "x"}) == ({}, [])


@pytest.mark.parametrize(
    "order, samplers",
    [
        ("top_k;top_p;temperature", ("top_k", "top_p", "temperature")), ("penalties; dry;top-k;typ;nucleus;minp;xtc;temp", ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")),
        ("top_k;mirostat", None), ("top_k;top_k", None), (7, None), ("", None),
    ],
)  # fmt: skip
def test_orders_by_llama_cpps_names(order, samplers):
    values, refused = recommended({"general.sampling.sequence": order})
    assert values == ({"samplers": samplers} if samplers is not None else {}) and bool(refused) == (samplers is None)
    Sampling(**values)


@pytest.mark.parametrize(
    "key, value",
    [
        ("temp", -1.0),
        ("temp", "warm"),
        ("temp", float("nan")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("penalty_last_n", -1),
        ("xtc_probability", 0.5),
        ("mirostat", 2),
    ],
)
def test_what_cannot_be_is_named_and_left_out(key, value):
    values, refused = recommended(
        {f"general.sampling.{key}": value, "general.sampling.top_p": 0.9} if key != "top_p" else {"general.sampling.top_p": value}
    )
    assert len(refused) == 1 and key in refused[0] and set(values) <= {"top_p"} and len(refused[0]) < 100
