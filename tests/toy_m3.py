"""What a toy M3 writes: prompts prefilled, then decoded step by step, with drafts and a late request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from m3cp.toy import ToyM3


@dataclass
class Run:
    """What a run gave: the requests' tokens, a hash of every step's logits, draft tokens offered and accepted."""

    tokens: list[list[int]]
    digest: str = ""
    offered: int = 0
    accepted: int = 0
    longest: int = 0


def generate(model: ToyM3, prompts: list[list[int]], *, steps: int, draft: int = 0, late: int | None = None) -> Run:
    """Prefill the prompts and decode `steps` steps; the last prompt joins at step `late`, in a mixed batch.

    Tokens are drawn, from noise that depends on the request and the position alone, so that they don't fall into loops;
    drafts continue the last place where the request's last token stood before.
    """
    device, size = model.table.device, model.size
    run = Run([list(p) for p in prompts])
    noise = -(-torch.rand(len(prompts), size.max_context, size.vocabulary, generator=torch.Generator().manual_seed(7)).log()).log()
    digest = hashlib.sha256()
    active: list[int] = []
    joining = list(range(len(prompts))) if late is None else list(range(len(prompts) - 1))
    query_len = 1 + draft
    for step in range(steps):
        if step == late:
            joining = [len(prompts) - 1]
        rows, positions = [], []
        for r in active:
            known = run.tokens[r]
            rows += [known[-1], *_drafts(known, draft)]
            positions += range(len(known) - 1, len(known) + draft)
        for r in joining:
            rows += run.tokens[r]
            positions += range(len(run.tokens[r]))
        tokens, where = (torch.tensor(values, device=device) for values in (rows, positions))
        chunks = [len(run.tokens[r]) for r in joining]
        logits = model(tokens, where, active + joining, decode_requests=len(active), query_len=query_len, chunks=chunks).cpu()
        digest.update(logits.numpy().tobytes())
        row = 0
        for r in active + joining:
            count = query_len if r in active else len(run.tokens[r])
            given, known = rows[row : row + count], run.tokens[r]
            at = 0 if r in active else count - 1
            while True:
                scores = logits[row + at] * 2 + noise[r, positions[row + at]]
                known.append(int(scores.argmax()))
                at += 1
                if at >= count or given[at] != known[-1]:
                    break
                run.accepted += 1
            run.offered += draft if r in active else 0
            row += count
        active, joining = active + joining, []
    model.step.check()
    run.digest, run.longest = digest.hexdigest(), max(map(len, run.tokens))
    return run


def _drafts(known: list[int], draft: int) -> list[int]:
    """The `draft` tokens that followed the last earlier place of the last token; that token again where there is none."""
    for at in range(len(known) - 2, -1, -1):
        if known[at] == known[-1]:
            return (known[at + 1 : at + 1 + draft] + [known[-1]] * draft)[:draft]
    return [known[-1]] * draft
