"""The Python client of a kvferry router; it loads neither torch nor ray.

::

    with Client("http://127.0.0.1:8000") as client:
        print(client.complete("The capital of France is", max_tokens=8).text)
        with client.stream([{"role": "user", "content": "Hello"}]) as stream:
            for chunk in stream:
                print(chunk.text, end="")
"""

from router.client.asynchronous import AsyncClient, AsyncStream
from router.client.calls import ToolCall, ToolCallDelta
from router.client.explanation import Admitted, Explanation, Placed
from router.client.results import Chunk, Completion, Health, ModelCard, Timings, Usage
from router.client.scores import RankedToken, ScoredToken, Tokenization
from router.client.synchronous import Client, Stream
from router.overview import ClusterOverview, WorkerOverview

__all__ = [
    "Admitted",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ClusterOverview",
    "Completion",
    "Explanation",
    "Health",
    "ModelCard",
    "Placed",
    "RankedToken",
    "ScoredToken",
    "Stream",
    "Timings",
    "Tokenization",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WorkerOverview",
]
