"""Backends: the code that runs a target. To add a backend, write a subclass of `Target` and add a line here; see
docs/add-a-target.md."""

from branchwise.registry import Registry

TARGETS = Registry(
    "target",
    {
        "toy": "branchwise.backends.toy:ToyTarget",
        "transformers": "branchwise.backends.transformers.target:TransformersTarget",
    },
)
