"""Driving a context by hand: look at the next tokens, go on from each in a fork, go back and try again."""

from __future__ import annotations

import argparse

import perdure

BRANCHES = 3
LENGTH = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    parser.add_argument("--prompt", default="The old house at the end of the street")
    options = parser.parse_args()
    model = perdure.Model(options.model)
    # One pool of cells: a fork costs nothing, which is what a search wants.
    with model.context(n_ctx=256, n_seq=BRANCHES + 1, shared=True) as ctx:
        ctx.decode(model.tokenize(options.prompt))
        length = ctx.length()
        row = ctx.logits()
        print(f"after {options.prompt!r}: entropy {row.entropy():.2f} nats")
        # Forking ends the view, so what is needed of it is taken first.
        starts = row.top(BRANCHES)
        best, total = 0, float("-inf")
        for branch, start in enumerate(starts, 1):
            ctx.fork(0, branch)
            tokens, logprob = follow(ctx, branch, start)
            print(f"  {logprob:7.2f}  {model.detokenize(tokens)!r}")
            if logprob > total:
                best, total = branch, logprob
        print(f"the best is branch {best}")

        # Back to the prompt, and on with another first token.
        ctx.truncate(length, seq=best)
        assert ctx.tokens(best) == ctx.tokens(0)
        tokens, logprob = follow(ctx, best, starts[-1])
        print(f"  {logprob:7.2f}  {model.detokenize(tokens)!r}")


def follow(ctx: perdure.Context, seq: int, start: perdure.Candidate) -> tuple[list[int], float]:
    """Go on greedily from `start`: the tokens, and their log probability in all."""
    tokens, total = [start.token], start.logprob
    while len(tokens) < LENGTH:
        ctx.decode([tokens[-1]], seq)
        (likeliest,) = ctx.logits().top(1)
        tokens.append(likeliest.token)
        total += likeliest.logprob
    return tokens, total


if __name__ == "__main__":
    main()
