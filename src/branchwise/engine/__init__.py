"""The step, and who joins it."""

from branchwise.engine.engine import Engine, FinishReason, Generation, Piece, Request

__all__ = ["Engine", "FinishReason", "Generation", "Piece", "Request"]
