"""The loss backends' work in torch, for loss_backends.py, which runs this by another interpreter.

python loss_backends_torch.py TOKENS VOCABULARY HIDDEN_SIZE DTYPE COMPILED REPEATS
"""

import json
import statistics
import sys
import time

import torch


def stats(
    hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the tokens, from all logits."""
    logprobs = torch.log_softmax((hidden @ head.to(hidden.dtype).T).float(), dim=-1)
    logps = logprobs.gather(-1, ids[:, None])[:, 0]
    return logps, -(logprobs.exp() * logprobs).sum(dim=-1)


def main() -> None:
    tokens, vocabulary, size = map(int, sys.argv[1:4])
    dtype, compiled, repeats = getattr(torch, sys.argv[4]), sys.argv[5] == "1", int(sys.argv[6])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, dtype=dtype, device=device, requires_grad=True)
    head = (torch.randn(vocabulary, size, device=device) / size**0.5).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=device)
    cotangents = [torch.randn(tokens, device=device) for _ in range(2)]
    function = torch.compile(stats) if compiled else stats

    def step() -> float:
        hidden.grad = head.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.backward(function(hidden, head, ids), cotangents)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step()
    figures = {"seconds": statistics.median(step() for _ in range(repeats))}
    if device == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
