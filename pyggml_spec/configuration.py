"""What a session really uses, for the configuration line."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """What is in use.

    Attributes:
        lookup: the n-gram method, None without one.
        width, widths: rows of the widest block; what the policy chooses from, 1 being plain decoding, empty where the width is fixed.
        encoder: of pictures, None without one.
        context: where ``n_ctx`` comes from: "the model's", "of N: memory" where less fits than the N trained tokens, "" if it was requested.
        kv_type: types of K and V rows.
        draws: whether drafts of sampled text are drawn with the target's noise.
        memory: bytes by purpose.
        notes: sentences about this model, device and build.
    """

    target: str
    drafter: str | None
    lookup: str | None
    encoder: str | None
    device: str
    threads: int
    width: int
    widths: tuple[int, ...]
    n_ctx: int
    context: str
    kv_type: str
    kernels: str
    draws: bool
    memory: dict[str, int]
    notes: tuple[str, ...]


def configuration_of(session: Any) -> Configuration:
    """What this ``Session`` uses."""
    runner, drafter, weights = session.runner, session.drafter, session.target.weights
    options, policy, busy = runner.options, session.engine.policy, []
    runner.threads.refresh()
    now, most = runner.threads.now, runner.threads.most
    if now != most:
        busy.append(f"other processes use the CPU: {now} of {most} threads compute now, all of them once it is idle")
    return Configuration(
        target=session.target.file.path.name,
        drafter=drafter.title if drafter is not None else None,
        lookup=session.lookup.method if session.lookup is not None else None,
        encoder=session.encoder.file.path.name if session.encoder is not None else None,
        device=", ".join(map(str, weights.segments)) if weights.segments else session.backend.device.name,
        threads=max(backend.threads for backend in session.backends),
        width=options.width if drafter is not None else 1,
        widths=tuple(sorted({plan.tokens for plan in policy.worth_trying})) if policy is not None else (),
        n_ctx=options.n_ctx,
        context=session.context_from,
        kv_type=str(options.kv) if drafter is None or options.kv == options.draft_kv else f"{options.kv}, drafter {options.draft_kv}",
        kernels=_kernels(session),
        draws=session.backend.draws,
        memory={} if runner.graphs.closed else runner.memory(),
        notes=(*session.notes, *busy),
    )


def _kernels(session: Any) -> str:
    """Native kernels, and for how much of the weights; ggml's on devices other than CPUs."""
    level = next((backend.level for backend in session.backends if backend.level is not None), None)
    if level is None:
        return "ggml"
    loaded = [session.target.weights, *(method.weights for method in (session.drafter.methods if session.drafter is not None else ()))]
    native, rest = sum(w.native_bytes for w in loaded), sum(w.other_matrix_bytes for w in loaded)
    share = f" for {100 * native / (native + rest):.0f} % of the weights" if rest else ""
    reason = session.target.ggml_attention
    return f"native ({level.name}){share}" + (f", attention by ggml's because {reason}" if reason else "")
