"""List mutations of the kernels' twins in torch and of the kernels for the CPU."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TWINS = ("tests/unit/cuda_ops/test_kernels_twins.py",)
_QUANTIZE = ("tests/unit/cuda_ops/test_quantize.py",)

MUTATIONS = (
    Mutation(
        "cuda_ops/twins.py",
        "add_(update, alpha=1 - args.dampening)",
        "add_(update)",
        "SGD forgets its dampening",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/twins.py",
        "_write(exp_avg, torch.lerp(exp_avg, gradient, 1 - args.beta2), args.found_inf)",
        "exp_avg.copy_(torch.lerp(exp_avg, gradient, 1 - args.beta2))",
        "a skipped step changes Lion's momentum",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/host_kernels.py",
        "(np.sqrt(b) * root + eps)",
        "((np.sqrt(b) + eps) * root)",
        "Adam on the CPU corrects eps as well",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/host_kernels.py",
        "(u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))",
        "(u + np.uint32(0x8000))",
        "ties are rounded up in bf16",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/norm.py",
        "for rows in (tensor[:whole].view(-1, _ROW), tensor[whole:].view(1, -1)) if",
        "for rows in (tensor[:whole].view(-1, _ROW),) if",
        "the norm leaves out what does not fill a row",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/loss_scale.py",
        "stuck = shrink & (scale <= min_scale)",
        "stuck = shrink & (scale < min_scale)",
        "an overflow at the smallest scale is not told",
        _TWINS,
    ),
    Mutation(
        "cuda_ops/quantize_twins.py",
        "torch.bitwise_or(codes[:, 0] & 15, codes[:, 1] << 4, out=target)",
        "torch.bitwise_or(codes[:, 1] & 15, codes[:, 0] << 4, out=target)",
        "the halves of packed bytes are swapped",
        _QUANTIZE,
    ),
    Mutation(
        "cuda_ops/quantize_twins.py",
        "later = (old * beta).add_(lost.mul_(1 - beta))",
        "later = (old * beta).add_(lost)",
        "error feedback adds up what was lost",
        _QUANTIZE,
    ),
    Mutation(
        "cuda_ops/quantize_host_kernels.py",
        "return max(one[0] / most, SMALLEST)",
        "return one[0] / most",
        "a block of denormals has an infinite reciprocal on the CPU",
        _QUANTIZE,
    ),
    Mutation(
        "cuda_ops/signs_twins.py",
        "positive = x >= 0",
        "positive = x > 0",
        "the sign of zero is not that of the kernels",
        ("tests/unit/cuda_ops/test_signs.py",),
    ),
)
