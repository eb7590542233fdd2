"""Weighted fair shares of one thing that is served in tokens: pure arithmetic, no clock but its own.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), as virtual token counters have it for language models (Sheng et
al., 2024). A flow's *tag* is the virtual time at which what it has next begins: it grows by the tokens that the flow is
served, divided by its weight, and the flow with the least tag goes next. So over any time in which two flows wait, what
they get differs by less than a request of each, whatever either asks for. Who had nothing to ask for meanwhile begins
at the present virtual time: idleness is no credit, and what was served too much stays a debt as long as others wait.

Life cycle of a flow: there from its first request on, forgotten when nobody waits any more: then a new *period* begins.
Of one that does not wait, and owes nothing, nothing has to be known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Flow:
    """One who has a share.

    Attributes:
        weight: its share beside those of others.
        tag: virtual time at which what it has next begins.
        tokens, requests: that wait.
    """

    weight: float
    tag: float
    tokens: float = 0.0
    requests: int = 0


FORGET = 256
"""Flows from which on those that owe nothing are looked for."""


class Shares:
    """The flows that share something.

    Attributes:
        period: grows by one when nobody waits any more.
    """

    def __init__(self) -> None:
        self.period = 0
        self._flows: dict[str, Flow] = {}
        self._now = 0.0
        self._waiting = 0
        self._forget_at = FORGET

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, name: str, weight: float, tokens: float) -> None:
        """A request of a flow waits; the latest weight counts."""
        if len(self._flows) >= self._forget_at:
            self._flows = {key: flow for key, flow in self._flows.items() if flow.requests or flow.tag > self._now}
            self._forget_at = max(FORGET, 2 * len(self._flows))
        flow = self._flows.setdefault(name, Flow(weight, self._now))
        flow.weight = weight
        if not flow.requests:
            flow.tag = max(flow.tag, self._now)
        flow.tokens += tokens
        flow.requests += 1
        self._waiting += 1

    def serve(self, name: str, tokens: float) -> None:
        """A request of a flow has been served."""
        flow = self._flows[name]
        self._now = max(self._now, flow.tag)
        flow.tag += tokens / flow.weight
        self.remove(name, tokens)

    def remove(self, name: str, tokens: float) -> None:
        """A request of a flow waits no more."""
        flow = self._flows[name]
        flow.tokens = max(0.0, flow.tokens - tokens)
        flow.requests -= 1
        self._waiting -= 1
        assert flow.requests >= 0, "it waited"
        if not self._waiting:
            # Nobody waits, so nobody was kept from anything by what others got.
            self._flows.clear()
            self._now = 0.0
            self.period += 1

    def correct(self, name: str, tokens: float, period: int) -> None:
        """What a flow was served in a period came to so many tokens more, or fewer, than were reckoned with."""
        flow = self._flows.get(name)
        if flow is not None and period == self.period:
            flow.tag = max(flow.tag + tokens / flow.weight, 0.0)

    def least(self) -> str:
        """The flow that goes next; there must be one that waits."""
        waiting = ((flow.tag, name) for name, flow in self._flows.items() if flow.requests)
        return min(waiting, key=lambda each: each[0])[1]

    def ahead(self, name: str, weight: float, own: float) -> float:
        """Tokens that go before one more request of a flow, ``own`` of them its own, if nothing further comes."""
        flow = self._flows.get(name)
        tag = self._now if flow is None else flow.tag if flow.requests else max(flow.tag, self._now)
        begins = tag + own / weight
        # All that begins no later, and of each of the others a whole request is the least that does.
        others = (
            min(other.tokens, (begins - other.tag) * other.weight + other.tokens / other.requests)
            for key, other in self._flows.items()
            if key != name and other.requests and other.tag <= begins
        )
        return own + sum(others)

    def heaviest(self) -> str:
        """The flow with most tokens waiting for its weight; there must be one that waits."""
        waiting = ((flow.tokens / flow.weight, name) for name, flow in self._flows.items() if flow.requests)
        return max(waiting, key=lambda each: each[0])[1]
