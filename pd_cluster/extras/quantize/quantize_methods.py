"""Methods of choosing codes and scales: rounding, GPTQ, and scales that move between layers (SmoothQuant, AWQ).

GPTQ: Frantar et al., 2022. SmoothQuant: Xiao et al., 2022. AWQ: Lin et al., 2023. Knows nothing of models.
"""

from __future__ import annotations

import logging

import torch

from pd_cluster.extras.quantize.quantize_schemes import Scheme

log = logging.getLogger(__name__)

DAMPING = 0.01  # relative to the mean of the Hessian's diagonal
COLUMNS = 128  # columns that GPTQ processes before it updates the rest
RATIOS = 20  # the number of ratios that AWQ tries
LEAST = 1e-4


def round_to_nearest(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [N, K] and scales [N, G] of a weight [N, K], both float32."""
    groups = weight.to(torch.float32).reshape(len(weight), -1, scheme.group_of(weight.shape[1]))
    steps = scheme.steps(groups)
    return scheme.rounded(groups, steps.unsqueeze(-1)).flatten(1), steps


def numbers(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Returns the dequantized weight of codes and scales."""
    return (codes.reshape(*steps.shape, -1) * steps.unsqueeze(-1)).flatten(1)


def gptq(weight: torch.Tensor, hessian: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds column by column, and compensates each error in the following columns.

    `hessian` [K, K]: the sum of x xᵀ over the layer's inputs. With too few inputs, rounds to nearest.
    """
    left, group = weight.to(torch.float32).clone(), scheme.group_of(weight.shape[1])
    hessian = hessian.to(torch.float64).clone()
    dead = hessian.diagonal() <= 0
    hessian.diagonal()[dead] = 1
    left[:, dead] = 0
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        log.warning("too few inputs for GPTQ: a weight of %s is rounded to nearest", list(weight.shape))
        return round_to_nearest(weight, scheme)
    inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    if failed:
        return round_to_nearest(weight, scheme)
    upper = inverse.to(torch.float32)
    codes = torch.empty_like(left)
    all_steps = []
    for start in range(0, left.shape[1], COLUMNS):
        stop = min(start + COLUMNS, left.shape[1])
        errors = torch.zeros(len(left), stop - start)
        for at in range(start, stop):
            if at % group == 0:
                all_steps.append(scheme.steps(left[:, at : at + group]))
            steps = all_steps[-1]
            codes[:, at] = scheme.rounded(left[:, at], steps)
            error = (left[:, at] - codes[:, at] * steps) / upper[at, at]
            left[:, at + 1 : stop] -= error.unsqueeze(1) * upper[at, at + 1 : stop]
            errors[:, at - start] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes, torch.stack(all_steps, dim=1)


def smooth_scales(inputs: torch.Tensor, weights: list[torch.Tensor], strength: float) -> torch.Tensor:
    """Returns SmoothQuant's scales [K], which divide the inputs and multiply the weights.

    `inputs` [K]: each feature's largest magnitude.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = inputs.clamp(min=LEAST).pow(strength) / largest.clamp(min=LEAST).pow(1 - strength)
    return scales.clamp(min=LEAST)


def awq_scales(inputs: torch.Tensor, weights: list[torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """Returns AWQ's scales [K]: a power of the inputs' mean magnitudes, with the exponent that gives the least error.

    `inputs` [rows, K]: a sample.
    """
    mean = inputs.abs().mean(0).clamp(min=LEAST)
    products = [inputs @ weight.T for weight in weights]
    best, least = torch.ones_like(mean), float("inf")
    for at in range(RATIOS):
        scales = mean.pow(at / RATIOS)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(min=LEAST)
        error = 0.0
        for weight, product in zip(weights, products, strict=True):
            rounded = numbers(*round_to_nearest(weight * scales, scheme)) / scales
            error += float((inputs @ rounded.T - product).square().mean())
        if error < least:
            best, least = scales, error
    return best
