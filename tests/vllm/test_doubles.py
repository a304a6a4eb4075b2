"""The doubles that stand in for vLLM elsewhere are like it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from branchwise.integrations.vllm.hooks import HOOKED, READ, find, why_not
from tests import vllm_doubles


def double_of(name: str) -> Any:
    found = vllm_doubles
    for part in name.partition(":")[2].split("."):
        found = getattr(found, part)
    return found


def test_this_vllm_is_one_that_is_known() -> None:
    assert why_not() is None


@pytest.mark.parametrize("name", HOOKED)
def test_a_double_has_the_parameters_of_what_it_stands_for(name: str) -> None:
    real, double = (inspect.signature(one).parameters for one in (find(name), double_of(name)))
    assert list(real) == list(double)
    assert [one.default for one in real.values()] == [one.default for one in double.values()]


@pytest.mark.parametrize("name", READ)
def test_a_double_has_no_fields_of_its_own(name: str) -> None:
    assert {one.name for one in fields(double_of(name))} <= {one.name for one in fields(find(name))}
