"""What can go wrong for a user, as one small tree of exceptions.

    BranchwiseError          every mistake that a sentence can explain; the command line prints it and exits with 2
    ├── UsageError           a value outside its range, an empty prompt, a prompt longer than the context
    │   └── QueueFull        more requests at once than the engine lets wait
    ├── UnknownName          a name that no registry knows; says which name is nearest
    ├── PairingError         two parts that do not fit together; says which names would
    └── ModelError           weights that cannot be found, fetched, read or trusted
        └── UnsupportedModel an architecture whose tree pass could not be exact; refused at load

A message is one sentence that says what happened, and then what to do about it. `assert` is kept for our own bugs.
A `LossyWarning` is no mistake: it says that what was asked for changes the distribution. Neither is a `CutWarning`.
"""


class BranchwiseError(Exception):
    """A mistake that the message explains; never shown with a traceback."""


class UsageError(BranchwiseError):
    """A value that cannot be used as given."""


class QueueFull(UsageError):
    """A request that came while as many were waiting as may; the same request can be submitted later."""


class UnknownName(BranchwiseError):
    """A name that is not in the registry it was looked up in."""


class PairingError(BranchwiseError):
    """Parts that cannot work together, such as a verifier and a kind of draw."""


class ModelError(BranchwiseError):
    """A model that cannot be found, fetched, read or trusted."""


class UnsupportedModel(ModelError):
    """A model that loads but whose tree pass could not be exact."""


class LossyWarning(UserWarning):
    """What is about to write does not keep the target's distribution; the command line prints it as one line."""


class CutWarning(UserWarning):
    """Trees are smaller than was asked for; the command line prints it as one line."""


def first_line(error: BaseException) -> str:
    """What an exception of another package says, short enough for a sentence of ours."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (line if len(line) <= 200 else line[:200] + "…").rstrip(".: ")
