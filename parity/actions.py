"""What befalls an engine between its steps, and how a step may be run in parts."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from serving.parts import run_ahead, split
from serving.step import Step

if TYPE_CHECKING:
    from parity.workload import Session


class Action(StrEnum):
    """Name what happens at a step; where it does not fit the engine's state, nothing does."""

    NOTHING = "nothing"
    PREEMPT = "preempt"  # a running request loses its blocks and computes all anew
    RELOAD = "reload"  # a running request loses its blocks and gets its KV back
    FORK = "fork"  # a decoding request gets a second one beside it
    REORDER = "reorder"  # beams go on from each other's histories
    ABORT = "abort"  # a request ends before the step
    ABORT_IN_FLIGHT = "abort in flight"  # a request of the step ends before its tokens come back
    SLEEP = "sleep"  # the KV cache is lost, all start over on another one
    SPLIT = "split"  # the step runs as two microbatches
    AHEAD = "ahead"  # a draft model feeds the drafts one by one before the verify
    DUMMY = "dummy"  # a step without requests comes first


def before_step(session: Session, action: Action) -> None:
    """Let happen what an action does before the next step is planned."""
    engine, dice = session.engine, session.dice
    running, decoding = engine.running, engine.decoding
    if action in (Action.PREEMPT, Action.RELOAD) and running:
        request = dice.pick(running)
        engine.preempt(request, reload=action is Action.RELOAD and engine.may_reload(request))
    elif action is Action.ABORT and running:
        session.abort(dice.pick(running))
    elif action is Action.FORK and decoding and len(running) < engine.config.max_requests:
        request = dice.pick(decoding)
        if engine.can_fork(request):
            session.fork(request)
    elif action is Action.REORDER and len(decoding) > 1:
        turn = 1 + dice.below(len(decoding) - 1)
        parent, beam = decoding[0], decoding[turn]
        if engine.can_fork(parent):
            session.reorder(beam, parent)
    elif action is Action.SLEEP and running:
        session.sleep()


def parts_of(session: Session, action: Action, step: Step) -> list[Step]:
    """Give the forward calls that a step is run as."""
    config = session.config
    knows_fed = config.policy.knows_drafts
    if action is Action.DUMMY:
        return [session.engine.dummy_step(1 + session.dice.below(8)), step]
    if action is Action.AHEAD:
        return run_ahead(step, knows_fed=knows_fed)
    if action is Action.SPLIT and step.num_tokens > 1:
        hit = any("same-step hit" in piece.events for piece in step.pieces)
        # A hit whose block the other microbatch fills would be read before it is written.
        if config.in_order or knows_fed or not hit:
            return list(split(step, 1 + session.dice.below(step.num_tokens - 1), knows_fed=knows_fed))
    return [step]


def in_flight(session: Session, action: Action, step: Step) -> None:
    """Let happen what an action does between a step and its answer."""
    if action is Action.ABORT_IN_FLIGHT:
        session.abort(session.dice.pick(step.pieces).request_id)
