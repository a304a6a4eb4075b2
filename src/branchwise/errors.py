"""The errors that a user can meet, as one small tree of exceptions.

    BranchwiseError          every mistake that a sentence can explain; the command line prints it and exits with 2
    ├── UsageError           a value outside its range, an empty prompt, a prompt longer than the context
    │   └── QueueFull        more requests at once than the engine lets wait
    ├── UnknownName          a name that no registry knows; says which name is nearest
    ├── PairingError         two parts that do not fit together; says which names would
    └── ModelError           weights that cannot be found, fetched, read or trusted
        └── UnsupportedModel an architecture whose tree pass could not be exact; refused at load

A message is one sentence that says what happened, and then what to do about it. `assert` is kept for our own bugs. A
`LossyWarning` is not an error: it says that the requested method changes the distribution. Nor are a `CutWarning` and a
`LargeDraftWarning`.
"""


class BranchwiseError(Exception):
    """An error that its message explains; the command line shows it without a traceback."""


class UsageError(BranchwiseError):
    """A value that cannot be used as given."""


class QueueFull(UsageError):
    """A request that came while the queue was full; it can be submitted again later."""


class UnknownName(BranchwiseError):
    """A name that its registry does not have."""


class PairingError(BranchwiseError):
    """Parts that cannot work together, such as a verifier and a kind of draw."""


class ModelError(BranchwiseError):
    """A model that cannot be found, fetched, read or trusted."""


class UnsupportedModel(ModelError):
    """A model that loads but whose tree pass could not be exact."""


class LossyWarning(UserWarning):
    """The requested method does not keep the target's distribution; the command line prints this as one line."""


class CutWarning(UserWarning):
    """Trees are smaller than requested; the command line prints this as one line."""


class LargeDraftWarning(UserWarning):
    """The draft model is as large as its target; the command line prints this as one line."""


def first_line(error: BaseException) -> str:
    """The message of another package's exception, short enough for a sentence of ours."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (line if len(line) <= 200 else line[:200] + "…").rstrip(".: ")
