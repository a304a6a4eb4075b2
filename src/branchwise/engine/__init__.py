"""The engine: requests, their admission, and the step."""

from branchwise.engine.engine import Engine
from branchwise.engine.request import FinishReason, Generation, Piece, Request

__all__ = ["Engine", "FinishReason", "Generation", "Piece", "Request"]
