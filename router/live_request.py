"""One request under way, and what the dispatcher remembers of it.

Life cycle: made when the request is let in, dropped in the moment its machine has ended; only its mailbox stays with
the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.mailbox import Mailbox
from router.policy import Placement
from router.request import RequestMachine
from router.request_table import RequestState


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One live request.

    Attributes:
        machine: decides.
        mailbox: its reader's.
        placement: where its latest attempt runs, or ran.
        answered: whether its first token was given out.
        charged_for: state and attempt that its workers are charged for.
    """

    machine: RequestMachine
    mailbox: Mailbox = field(default_factory=Mailbox)
    placement: Placement | None = None
    answered: bool = False
    charged_for: tuple[RequestState, int] = (RequestState.QUEUED, 0)
