"""Opens several requests that continue one prompt with one pair of messages: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.errors import InvariantViolation
from protocol.forks import Fork
from router.front.generation import Generation
from router.instructions import Instruction, SendPrefill, SendReserve


def check_alike(generations: Sequence[Generation]) -> None:
    """Refuse to take together what does not continue one prompt in one way.

    Raises:
        InvariantViolation: there is none, or two differ in more than the seed.
    """
    plain = [msgspec.structs.replace(generation.sampling, seed=0) for generation in generations]
    for generation, sampling in zip(generations, plain, strict=True):
        first = generations[0]
        if (generation.token_ids, generation.cache_salt, sampling) != (first.token_ids, first.cache_salt, plain[0]):
            raise InvariantViolation("generations taken together must differ by their seeds alone")
        if generation is not first and generation.prompt_logprobs is not None:
            raise InvariantViolation("of generations taken together only the first may ask for the prompt's scores")
    if not generations:
        raise InvariantViolation("nothing to generate")


def fold(opened: Sequence[Sequence[Instruction]]) -> list[Instruction]:
    """What opens every one of some attempts, from what would open each by itself; the first one's messages carry all.

    Args:
        opened: of each attempt, all on the same pair of workers.
    """
    first, *others = opened
    forks = tuple(
        Fork(instruction.message.key, instruction.message.sampling.seed)
        for instructions in others
        for instruction in instructions
        if isinstance(instruction, SendPrefill)
    )
    folded: list[Instruction] = []
    for instruction in first:
        match instruction:
            case SendReserve(peer, reserve):
                folded.append(SendReserve(peer, msgspec.structs.replace(reserve, forks=forks)))
            case SendPrefill(peer, prefill):
                folded.append(SendPrefill(peer, msgspec.structs.replace(prefill, forks=forks)))
            case _:
                raise InvariantViolation(f"{type(instruction).__name__} does not open an attempt")
    return folded
