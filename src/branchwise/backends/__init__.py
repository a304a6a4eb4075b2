"""Backends: what runs a target. Adding one is a subclass of `Target` and a line here; see docs/add-a-target.md."""

from branchwise.registry import Registry

TARGETS = Registry(
    "target",
    {
        "toy": "branchwise.backends.toy:ToyTarget",
        "transformers": "branchwise.backends.transformers.target:TransformersTarget",
    },
)
