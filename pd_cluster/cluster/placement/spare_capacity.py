"""Determines whether the cluster would soon start a request. Pure functions of instance state.

A request that would only wait at an instance is better held in the admission queue (admission_queue.py), where it takes
its turn among clients, uses no instance memory, and goes to the first instance with room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance

BACKLOG_S = 0.25  # seconds of prompts ahead of an instance: more than a step, so that it never runs out of work
MIN_PROMPTS = 2  # an instance may have this many prompts, however long: one being computed, and the next
UNMEASURED_PROMPTS = 16  # MIN_PROMPTS for an instance that has not reported its speed yet
MIN_WAITING = 2  # sequences that may wait at a decode instance: landed ones wait for a step or two in any case
WAITING_SHARE = 4  # if that allows more, one may wait for each 4 that run, to replace sequences that end
FULL = 7 / 8  # share of slots or memory in use; the rest is for clients that have less than their share


class SpareCapacity(NamedTuple):
    """Whether some instance of each role takes requests and has room."""

    for_prompts: bool
    for_sequences: bool
    for_all: bool  # there is room beyond the reserve for clients with less than their share
    longest: float = math.inf  # tokens of the longest request for which there is room


ANYTHING_FITS = SpareCapacity(True, True, True)


def spare_capacity(instances: Sequence[Instance]) -> SpareCapacity:
    """Returns the spare capacity; ANYTHING_FITS if no instance takes requests: waiting would not help, and other code
    reports why.
    """
    prefills = (each for each in instances if each.role == "prefill" and each.takes_requests)
    decodes = (each for each in instances if each.role == "decode" and each.takes_requests)
    prefill, decode = next(prefills, None), next(decodes, None)
    if prefill is not None and decode is not None:
        return _spare_capacity(itertools.chain([prefill], prefills), itertools.chain([decode], decodes))
    takers = [instance for instance in instances if instance.takes_requests]
    return _spare_capacity(takers, takers) if takers else ANYTHING_FITS  # one instance does both legs


def _spare_capacity(prefills: Iterable[Instance], decodes: Iterable[Instance]) -> SpareCapacity:
    """Examines only as many instances as needed, because it runs for every request and the first ones usually have
    room.
    """
    for_sequences = for_all = False
    for decode in decodes:
        for_sequences = for_sequences or decodes_soon(decode)
        for_all = for_all or not is_nearly_full(decode)
        if for_sequences and for_all:
            break
    longest = 0.0
    for prefill in prefills:
        longest = max(longest, longest_soon(prefill))
        if longest == math.inf:
            break
    return SpareCapacity(longest > 0, for_sequences, for_all, longest)


def longest_soon(instance: Instance) -> float:
    """Returns the length of the longest prompt that would be started there within about BACKLOG_S; 0: none would."""
    if _starts_soon(instance, instance.num_outstanding, instance.prompt_tokens_ahead):
        return math.inf
    num_short = instance.num_outstanding - instance.num_long
    if instance.num_long and _starts_soon(instance, num_short, instance.prompt_tokens_before(0)):
        return instance.long_from
    return 0.0


def _starts_soon(instance: Instance, num_prompts: int, num_tokens: int) -> bool:
    """Whether a prompt behind these prompts and tokens would be started soon."""
    rate = instance.load.prefill_tokens_per_s
    return num_prompts < (MIN_PROMPTS if rate else UNMEASURED_PROMPTS) or num_tokens <= rate * BACKLOG_S


def decodes_soon(instance: Instance) -> bool:
    """Whether sequences would get a slot and memory there, now or within a few steps."""
    load, num_slots = instance.load, instance.num_slots
    most = max(MIN_WAITING, load.num_running // WAITING_SHARE)
    num_waiting = load.num_waiting - load.num_expected  # the expected ones wait for a prefill instance
    if num_waiting > most and num_waiting + instance.num_sent_since > most:
        return False
    return not num_slots or instance.num_current_sequences < num_slots + MIN_WAITING


def is_nearly_full(decode: Instance) -> bool:
    """Whether few slots, or little memory, are left."""
    load, num_slots = decode.load, decode.num_slots
    return load.num_held_blocks > FULL * load.num_blocks > 0 or decode.num_current_sequences >= FULL * num_slots > 0
