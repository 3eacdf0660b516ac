"""Asynchronous disk access is the runtime's own."""

from ..op_builder import AsyncIOBuilder
