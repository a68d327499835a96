"""Opacus's ghost clipping, where PyTorch with a GPU and Opacus are installed: the MLP of the other lines."""

import importlib.util
import time
from collections.abc import Callable

from harness import interleaved

from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.fast_jax import ROWS, WIDTH

TENSORFLOW = False
cases = Cases()


@cases("Opacus, ghost clipping: MLP", 90)
def ghost(machine: Machine) -> Line:
    missing = [name for name in ("torch", "opacus") if importlib.util.find_spec(name) is None]
    if missing:
        return Line(f"Not installed, so there is no row of it: {', '.join(missing)}.", MEASURED)
    import torch
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    if not machine.cpu and not torch.cuda.is_available():
        return Line("PyTorch sees no GPU here, so there is no row of it.", MEASURED)
    device, width, rows = "cpu" if machine.cpu else "cuda", machine.size(*WIDTH), machine.size(*ROWS)
    nn = torch.nn

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))

    x, y = torch.randn(rows, 32, device=device), torch.randint(0, 10, (rows,), device=device)
    model, private = mlp().to(device), GradSampleModuleFastGradientClipping(mlp().to(device), max_grad_norm=1.0)

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()

    def clipped() -> None:
        # One backward pass for the norms, and one for the clipped sum.
        losses = nn.functional.cross_entropy(private(x), y, reduction="none")
        losses.mean().backward(retain_graph=True)
        private.zero_grad(set_to_none=True)
        weighted = torch.sum(private.get_clipping_coef() * losses)
        private.disable_hooks()
        weighted.backward()
        private.enable_hooks()

    def timed(step: Callable[[], None], calls: int = 10) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for _ in range(calls):
                step()
            if not machine.cpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / calls * 1e3

        return run

    base, took = interleaved({"plain": timed(plain), "clipped": timed(clipped)}, machine.size(5, 1)).values()
    text = f"{took / base:.2f} of its plain gradient, {base:.2f} ms"
    return Line(text, MEASURED, {"plain": base, "clipped": took, "rows": rows})
