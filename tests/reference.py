"""Dense float64 twins of the numeric routines, written like the papers' pseudocode and sharing no code with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import ceil, cos, exp, inf, log, pi, prod, sqrt
from statistics import median

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.core.cohort import Clients, Cohort, Proxy, RowMatrix
from fedspec_dist.core.parameters import Segment


def high_pass_matrix(d: int, ratio: float) -> Tensor:
    """`I - sum_{k < cut} c_k cos(2 pi k (i - j) / d)`, `[d, d]`: the identity less its low frequencies."""
    num_coefficients = d // 2 + 1
    cut = int(Fraction(str(ratio)) * num_coefficients)
    matrix = [[float(i == j) for j in range(d)] for i in range(d)]
    for k in range(cut):
        scale = 1 / d if 2 * k in (0, d) else 2 / d
        for i in range(d):
            for j in range(d):
                matrix[i][j] -= scale * cos(2 * pi * k * (i - j) / d)
    return torch.tensor(matrix, dtype=torch.float64)


def fedgh_vectors(updates: Tensor, mode: str) -> Tensor:
    """The harmonized updates `[K, P]`, by projecting the vectors themselves."""
    received = [update.clone() for update in updates.double()]
    running = [update.clone() for update in updates.double()]
    for i in range(len(running)):
        for j in range(i + 1, len(running)):
            source = running if mode == "pairwise" else received
            left, right = source[i].clone(), source[j].clone()
            if float(left @ right) < 0:
                if float(right @ right) >= 1e-24:
                    running[i] = running[i] - (running[i] @ right) / (right @ right) * right
                if float(left @ left) >= 1e-24:
                    running[j] = running[j] - (running[j] @ left) / (left @ left) * left
    return torch.stack(running)


def fipa_mean_fisher(
    bases: Sequence[Tensor], eigenvalues: Sequence[Tensor], updates: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """`Hbar [P, P]` and `b [P]`, both as sums over clients."""
    num_parameters = updates.shape[1]
    mean = torch.zeros(num_parameters, num_parameters, dtype=torch.float64)
    right = torch.zeros(num_parameters, dtype=torch.float64)
    for basis, values, update, weight in zip(bases, eigenvalues, updates, weights, strict=True):
        fisher = basis.double() @ torch.diag(values.double()) @ basis.double().T
        mean += weight.double() * fisher
        right += weight.double() * fisher @ update.double()
    return mean, right


def fipa_dense(
    bases: Sequence[Tensor], eigenvalues: Sequence[Tensor], updates: Tensor, weights: Tensor, damping: float
) -> Tensor:
    """`(Hbar + damping I)^-1 b`, or `Hbar^+ b` without damping."""
    mean, right = fipa_mean_fisher(bases, eigenvalues, updates, weights)
    if damping == 0:
        return torch.linalg.pinv(mean, rtol=1e-5, hermitian=True) @ right
    return torch.linalg.inv(mean + damping * torch.eye(len(mean), dtype=torch.float64)) @ right


def fipa_released(
    bases: Sequence[Tensor],
    eigenvalues: Sequence[Tensor],
    updates: Tensor,
    weights: Tensor,
    damping: float,
    step: float,
) -> Tensor:
    """The released program's merge, with its second term: `step (damping Q z + (b - Q Q^T b))`."""
    stacked = torch.cat([basis.double() for basis in bases], dim=1)
    importance = torch.cat([w.double() * v.double() for w, v in zip(weights, eigenvalues, strict=True)])
    q, r = torch.linalg.qr(stacked, mode="reduced")
    small = r @ torch.diag(importance) @ r.T
    small = (small + small.T) / 2
    right = torch.zeros(updates.shape[1], dtype=torch.float64)
    for basis, values, update, weight in zip(bases, eigenvalues, updates, weights, strict=True):
        right += weight.double() * basis.double() @ (values.double() * (basis.double().T @ update.double()))
    projected = q.T @ right
    z = torch.linalg.inv(small + damping * torch.eye(len(small), dtype=torch.float64)) @ projected
    return step * (damping * q @ z + (right - q @ projected))


def softmax_curvature(outputs: Tensor) -> Tensor:
    """`diag(p) - p p^T` for one row of logits `[C]`."""
    p = torch.exp(outputs) / torch.exp(outputs).sum()
    return torch.diag(p) - torch.outer(p, p)


def dense_fisher(
    forward: Callable[[Tensor, Tensor], Tensor],
    theta: Tensor,
    inputs: Tensor,
    curvature: Callable[[Tensor], Tensor],
) -> Tensor:
    """`(1/N) sum_n J_n^T S_n J_n`, `[P, P]`, one sample at a time."""
    total = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for n in range(len(inputs)):

        def outputs_at(parameters: Tensor, sample: Tensor = inputs[n : n + 1]) -> Tensor:
            return forward(parameters, sample)[0]

        jacobian = torch.autograd.functional.jacobian(outputs_at, theta)
        total += (jacobian.T @ curvature(outputs_at(theta).detach()) @ jacobian).double()
    return total / len(inputs)


class DenseRows:
    """The `RowMatrix` protocol on one dense tensor `[K, P]`, all columns on this process."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.double()

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def gram(self) -> Tensor:
        return self.rows @ self.rows.T

    def inner(self, other: RowMatrix) -> Tensor:
        return self.rows @ other.rows.T if isinstance(other, DenseRows) else other.inner(self).T

    def combine(self, coefficients: Tensor) -> Tensor:
        total = self.zeros()
        for coefficient, row in zip(coefficients, self.rows, strict=True):
            total += coefficient * row
        return total

    def dot(self, vector_slice: Tensor) -> Tensor:
        return self.rows @ vector_slice.double()

    def norms(self) -> Tensor:
        return self.rows.norm(dim=1)

    def qr_r(self) -> Tensor:
        return torch.linalg.qr(self.rows.T).R

    def combine_q(self, z: Tensor) -> Tensor:
        return torch.linalg.qr(self.rows.T).Q @ z

    def zeros(self) -> Tensor:
        return self.rows.new_zeros(self.rows.shape[1])

    def segment_grams(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        parts = [self.rows[:, start:stop] for start, stop in bounds]
        return torch.stack([part @ part.T for part in parts])

    def segment_dots(self, bounds: Sequence[tuple[int, int]], vector_slice: Tensor) -> Tensor:
        return torch.stack([self.rows[:, start:stop] @ vector_slice[start:stop].double() for start, stop in bounds])

    def segment_squares(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        return torch.stack([self.rows[:, start:stop].square().sum(1) for start, stop in bounds])

    def columnwise(self, function: Callable[..., Tensor], *others: DenseRows) -> Tensor:
        return function(self.rows, *(other.rows for other in others))


class DenseSlicing:
    """The `Slicing` protocol of one process, whose slice is the whole vector."""

    def __init__(self, width: int, num_columns: int) -> None:
        self.width, self.num_columns = width, num_columns

    def slice(self, vector: Tensor) -> Tensor:
        return vector.clone()

    def whole(self, vector_slice: Tensor) -> Tensor:
        return vector_slice

    def rows(self, slices: Tensor) -> DenseRows:
        return DenseRows(slices)

    def draw(self, block: Callable[[int, int], Tensor]) -> Tensor:
        count = ceil(self.num_columns / self.width)
        return torch.cat([block(number, self.width) for number in range(count)])[: self.num_columns]


def dense_cohort(
    updates: Tensor,  # [K, P]
    theta: Tensor | None = None,  # [P]
    *,
    num_samples: Sequence[int] | None = None,
    class_counts: Sequence[Sequence[int]] | None = None,
    num_steps: Sequence[int] | None = None,
    effective_steps: Sequence[float] | None = None,
    lr: float = 0.1,
    population: int | None = None,
    ids: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    segments: Sequence[Segment] = (),
    uploads: dict[str, Tensor] | None = None,
    proxy: Proxy | None = None,
    test_class_counts: Sequence[int] | None = None,
    memory: dict[str, Tensor] | None = None,
    clip_norm: float | None = None,
    block_width: int = 1024,
) -> Cohort:
    """A round on one process; what is not given is the same for every client."""
    num_clients = len(updates)
    steps = torch.tensor(num_steps or [1] * num_clients)
    clients = Clients(
        ids=torch.tensor(ids or list(range(num_clients))),
        num_samples=torch.tensor(num_samples or [1] * num_clients),
        class_counts=torch.tensor(class_counts or [[1]] * num_clients),
        num_steps=steps,
        effective_steps=torch.tensor(effective_steps, dtype=torch.float64) if effective_steps else steps.double(),
        lr=lr,
        population=population or num_clients,
    )
    return Cohort(
        DenseRows(updates),
        torch.tensor(weights, dtype=torch.float64) if weights else clients.shares,
        clients,
        torch.zeros(updates.shape[1], dtype=torch.float64) if theta is None else theta,
        DenseSlicing(block_width, updates.shape[1]),
        segments,
        uploads={name: DenseRows(rows) for name, rows in (uploads or {}).items()},
        proxy=proxy,
        test_class_counts=torch.tensor(test_class_counts) if test_class_counts else None,
        clip_norm=clip_norm,
        memory=memory or {},
    )


def without_frequencies_matrix(d: int, removed: Sequence[int]) -> Tensor:
    """The identity of size d less the waves of the given numbers of periods."""
    distance = torch.arange(d, dtype=torch.float64)[:, None] - torch.arange(d, dtype=torch.float64)
    matrix = torch.eye(d, dtype=torch.float64)
    for k in removed:
        matrix -= (1 if 2 * k in (0, d) else 2) / d * torch.cos(2 * pi * k * distance / d)
    return matrix


def low_pass_matrix(d: int, ratio: float) -> Tensor:
    num_coefficients = d // 2 + 1
    kept = num_coefficients - int(Fraction(str(ratio)) * num_coefficients)
    return without_frequencies_matrix(d, range(kept, num_coefficients))


def randomly_suppressed_matrices(sizes: Sequence[int], ratio: float, seed: int, step: int = 1) -> list[Tensor]:
    """Of a client's step (counting from 1): `cut` of each layer's frequencies, one draw per layer, in their order."""
    generator = np.random.default_rng(seed)
    for _ in range(step):
        matrices = []
        for d in sizes:
            cut = int(Fraction(str(ratio)) * (d // 2 + 1))
            removed = generator.choice(d // 2 + 1, cut, replace=False, shuffle=False) if cut else []
            matrices.append(without_frequencies_matrix(d, removed))
    return matrices


def moving_average_width(ratio: float) -> int:
    return min(range(1, 2000, 2), key=lambda width: abs(width - 0.443 / (ratio / 2)))


def smoothing_matrix(d: int, radius: int, weight: Callable[[int], float]) -> Tensor:
    """Each row the weights around its entry, those beyond the ends left out, divided by their sum."""
    rows = [[weight(i - j) if abs(i - j) <= radius else 0.0 for j in range(d)] for i in range(d)]
    matrix = torch.tensor(rows, dtype=torch.float64)
    return matrix / matrix.sum(1, keepdim=True)


def lapd_matrix(d: int, ratio: float) -> Tensor:
    width = moving_average_width(ratio)
    identity = torch.eye(d, dtype=torch.float64)
    return identity if d < width else identity - smoothing_matrix(d, width // 2, lambda k: 1.0)


def gaussian_matrix(d: int, ratio: float) -> Tensor:
    sigma = 0.1325 / (ratio / 2)
    identity = torch.eye(d, dtype=torch.float64)
    if d < moving_average_width(ratio):
        return identity
    return identity - smoothing_matrix(d, ceil(3 * sigma), lambda k: exp(-0.5 * (k / sigma) ** 2))


def centralization_matrix(shape: tuple[int, ...]) -> Tensor:
    """`I - e e^T` of each output unit; the identity for a vector."""
    size = prod(shape)
    if len(shape) < 2:
        return torch.eye(size, dtype=torch.float64)
    inputs = size // shape[0]
    return torch.block_diag(*[torch.eye(inputs, dtype=torch.float64) - 1 / inputs for _ in range(shape[0])])


def axis_order_matrix(shape: tuple[int, ...], axes: Sequence[int]) -> Tensor:
    """`[d, d]`: takes a tensor as it is stored to its entries read axis by axis, the last of `axes` the fastest."""
    size = prod(shape)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i, along in enumerate(product(*[range(shape[axis]) for axis in axes])):
        place = dict(zip(axes, along, strict=True))
        stored = sum(place[axis] * prod(shape[axis + 1 :]) for axis in axes)
        matrix[i, stored] = 1
    return matrix


def random_order_matrix(d: int, place: int) -> Tensor:
    index = torch.randperm(d, generator=torch.Generator().manual_seed(place))
    return torch.eye(d, dtype=torch.float64)[index]


def feddisco_weights(
    class_counts: Sequence[Sequence[int]], a: float, b: float, metric: str, target: Sequence[float] | None = None
) -> list[float]:
    """Client by client and class by class; `target` are shares that sum to 1, uniform ones if not given."""
    q = target or [1 / len(class_counts[0])] * len(class_counts[0])
    sizes = [sum(row) for row in class_counts]
    d = []
    for row, size in zip(class_counts, sizes, strict=True):
        p = [count / size for count in row]
        both = list(zip(p, q, strict=True))
        cosine = sum(x * y for x, y in both) / (sqrt(sum(x * x for x in p)) * sqrt(sum(y * y for y in q)))
        d.append(
            {
                "kl": sum(x * log(x / y) for x, y in both if x > 0),
                "l2": sqrt(sum((x - y) ** 2 for x, y in both)),
                "l1": sum(abs(x - y) for x, y in both),
                "cosine": 1 - cosine,
                "only_iid": 0.01 if cosine > 0.9 else inf,
            }[metric]
        )
    if metric == "kl" and sum(d) > 0:
        d = [value / sum(d) for value in d]
    t = [max(size / sum(sizes) - a * value + b, 0) for size, value in zip(sizes, d, strict=True)]
    return [value / sum(t) for value in t] if sum(t) > 0 else [size / sum(sizes) for size in sizes]


def adam_steps(
    values: list[Tensor],
    loss: Callable[[list[Tensor], int], Tensor],
    rates: Sequence[float],
    betas: tuple[float, float] = (0.5, 0.999),
) -> list[list[Tensor]]:
    """The values before the first and after each step down `loss(values, step)`; bias corrected, epsilon 1e-8."""
    history = [values]
    m = [torch.zeros_like(value) for value in values]
    v = [torch.zeros_like(value) for value in values]
    for step, rate in enumerate(rates):
        free = [value.clone().requires_grad_() for value in history[-1]]
        gradients = torch.autograd.grad(loss(free, step), free)
        m = [betas[0] * old + (1 - betas[0]) * g for old, g in zip(m, gradients, strict=True)]
        v = [betas[1] * old + (1 - betas[1]) * g**2 for old, g in zip(v, gradients, strict=True)]
        scales = [
            (mean / (1 - betas[0] ** (step + 1))) / ((square / (1 - betas[1] ** (step + 1))).sqrt() + 1e-8)
            for mean, square in zip(m, v, strict=True)
        ]
        history.append([value - rate * scale for value, scale in zip(history[-1], scales, strict=True)])
    return history


def fedawa_loss(logits: Tensor, updates: Tensor, theta: Tensor) -> Tensor:
    """On the vectors themselves."""
    p = torch.softmax(logits, 0)
    mean = sum(p[k] * updates[k] for k in range(len(updates)))
    loss = torch.zeros((), dtype=torch.float64)
    for k in range(len(updates)):
        local = theta + updates[k]
        loss = loss + p[k] * (1 - torch.dot(theta, local) / (torch.linalg.norm(theta) * torch.linalg.norm(local)))
        loss = loss + p[k] * torch.linalg.norm(updates[k] - mean)
    return loss


def fedlaw_model(x: Tensor, g: Tensor, updates: Tensor, theta: Tensor) -> Tensor:
    """`exp(g) sum_k softmax(x)_k y_k`, from the clients' models."""
    shares = torch.softmax(x, 0)
    return torch.exp(g) * sum(share * (theta + update) for share, update in zip(shares, updates, strict=True))


def fednova_update(updates: Tensor, weights: Sequence[float], a: Sequence[float]) -> Tensor:
    """Without a proximal term, every client with at least one step."""
    tau = sum(weight * steps for weight, steps in zip(weights, a, strict=True))
    normalised = [update / steps for update, steps in zip(updates, a, strict=True)]
    return tau * sum(weight * update for weight, update in zip(weights, normalised, strict=True))


def fedlws_model(
    updates: Tensor,
    theta: Tensor,
    weights: Sequence[float],
    layers: Sequence[tuple[int, int]],
    beta: float,
    min_tau: float,
    max_tau: float,
) -> Tensor:
    """The next model, from the clients' models, layer by layer."""
    parts = []
    for start, stop in layers:
        old = theta[start:stop]
        models = [old + update[start:stop] for update in updates]
        merged = sum(weight * model for weight, model in zip(weights, models, strict=True))
        deltas = [model - old for model in models]
        center = sum(deltas) / len(deltas)
        spread = sum(float((delta - center).norm()) for delta in deltas) / len(deltas)
        tau = min(max(beta * spread, min_tau), max_tau)
        moved = float((merged - old).norm())
        gamma = 1.0 if tau * moved == 0 else float(old.norm()) / (float(old.norm()) + tau * moved)
        parts.append(gamma * merged)
    return torch.cat(parts)


def inco_kernel(kernel: Tensor, reference: Tensor, clamp_max: float) -> Tensor:
    """One kernel `[height, width]`, before entries are cut."""
    n, n_ref = torch.linalg.norm(kernel), torch.linalg.norm(reference)
    unit, unit_ref = kernel / (n + 1e-7), reference / (n_ref + 1e-7)
    c = abs(float((unit_ref * unit).sum())) / (float((unit_ref * unit_ref).sum()) + 1e-7)
    return (unit + min(max(c, 0.0), clamp_max) * unit_ref) * (n + n_ref) / 2


def fisher_merge(updates: Tensor, fisher: Tensor, weights: Sequence[float], theta: Tensor) -> Tensor:
    """The next model, from the clients' models, parameter by parameter."""
    merged = []
    for j, start in enumerate(theta.tolist()):
        models = [start + float(update[j]) for update in updates]
        sure = [weight * float(row[j]) for weight, row in zip(weights, fisher, strict=True)]
        if sum(sure) < 1e-6:
            sure = list(weights)
        merged.append(sum(s * model for s, model in zip(sure, models, strict=True)) / sum(sure))
    return torch.tensor(merged, dtype=torch.float64)


def trimmed_columns(updates: Tensor, cut: int) -> Tensor:
    """The mean of each column without its `cut` smallest and largest entries."""
    columns = [sorted(column)[cut : len(column) - cut] for column in updates.double().T.tolist()]
    return torch.tensor([sum(column) / len(column) for column in columns], dtype=torch.float64)


def median_columns(updates: Tensor) -> Tensor:
    return torch.tensor([median(column) for column in updates.double().T.tolist()], dtype=torch.float64)


def adaptive_step(
    name: str, theta: float, d: float, m: float, v: float, *, lr: float, beta1: float, beta2: float, tau: float
) -> tuple[float, float, float]:
    """One parameter's next value, `m` and `v`."""
    m = beta1 * m + (1 - beta1) * d
    square = d * d
    if name == "adagrad":
        v = v + square
    elif name == "adam":
        v = beta2 * v + (1 - beta2) * square
    else:
        sign = (v > square) - (v < square)
        v = v - (1 - beta2) * square * sign
    return theta + lr * m / (sqrt(v) + tau), m, v


def sam_ascent(parameters: Tensor, gradient: Tensor, rho: float, scaled: Sequence[int], eta: float) -> Tensor:
    """`e [P]` of SAM, or of ASAM for the entries `scaled`, entry by entry."""
    scales = [abs(float(w)) + eta if i in scaled else 1.0 for i, w in enumerate(parameters)]
    norm = sum((t * float(g)) ** 2 for t, g in zip(scales, gradient, strict=True)) ** 0.5
    ascent = [rho * t * t * float(g) / norm for t, g in zip(scales, gradient, strict=True)]
    return torch.tensor(ascent, dtype=torch.float64)


def calibrated_cross_entropy(
    logits: Tensor, labels: Tensor, class_counts: Sequence[int], tau: float, with_own: bool = True
) -> float:
    """FedLC's loss, class by class; without the sample's own class in the denominator if not `with_own`."""
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        terms = {c: exp(z - tau * n**-0.25) for c, (z, n) in enumerate(zip(row, class_counts, strict=True)) if n > 0}
        others = sum(term for c, term in terms.items() if c != label)
        if with_own or others:
            total -= log(terms[label] / (others + with_own * terms[label]))
    return total / len(logits)


def feature_decorrelation(features: Tensor) -> float:
    """FedDecorr's second term: the features standardised one by one, then every pair of them."""
    num_samples, width = features.shape
    columns = []
    for column in features.T.tolist():
        mean = sum(column) / num_samples
        variance = sum((x - mean) ** 2 for x in column) / (num_samples - 1)
        columns.append([(x - mean) / (variance + 1e-8) ** 0.5 for x in column])
    products = [
        sum(x * y for x, y in zip(columns[i], columns[j], strict=True)) ** 2
        for i in range(width)
        for j in range(width)
        if i != j
    ]
    return sum(products) / len(products) / num_samples


def cosine_of(x: Sequence[float], y: Sequence[float]) -> float:
    inner = sum(a * b for a, b in zip(x, y, strict=True))
    return inner / (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5


def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> float:
    """MOON's second term, sample by sample."""
    total = 0.0
    for own, there, before in zip(z.tolist(), z_global.tolist(), z_previous.tolist(), strict=True):
        attraction, repulsion = exp(cosine_of(own, there) / temperature), exp(cosine_of(own, before) / temperature)
        total -= log(attraction / (attraction + repulsion))
    return total / len(z)


def relaxed_contrast(level: Tensor, labels: Tensor, temperature: float, threshold: float) -> tuple[float, float]:
    """FedRCL's two terms for one level `[B, C, H, W]` or `[B, d]`, from sorted lists of similarities."""
    images = level.reshape(*level.shape[:2], -1).tolist()
    features = [[sum(channel) / len(channel) for channel in image] for image in images]
    classes, contrasts, relaxations = labels.tolist(), [], []
    for i, anchor in enumerate(features):
        similarities = [cosine_of(anchor, other) for other in features]
        same = [s for j, s in enumerate(similarities) if classes[j] == classes[i]]
        different = sorted(s for j, s in enumerate(similarities) if classes[j] != classes[i])
        positive = exp(min(same) / temperature)
        contrasts.append(-log(positive / (positive + sum(exp(s / temperature) for s in different[-2:]))))
        least = min((s for j, s in enumerate(similarities) if classes[j] == classes[i] and j != i), default=-1.0)
        relaxations.append(log(1 + exp(((least if least >= threshold else -1.0) - 1) / temperature)))
    return sum(contrasts) / len(contrasts), sum(relaxations) / len(relaxations)


def krum_order(updates: Tensor, f: int) -> list[int]:
    """Clients by rising sum of squared distances to their `K - f - 2` nearest others, at least one."""
    num_clients = len(updates)
    scores = []
    for i in range(num_clients):
        others = sorted(float((updates[i] - updates[j]).square().sum()) for j in range(num_clients) if j != i)
        scores.append(sum(others[: max(num_clients - f - 2, 1)]))
    return sorted(range(num_clients), key=scores.__getitem__)


def multi_krum_mean(updates: Tensor, f: int, keep: int | None = None) -> Tensor:
    kept = krum_order(updates, f)[: len(updates) - f if keep is None else keep]
    return updates[kept].mean(0)


def geometric_median(updates: Tensor, weights: Sequence[float], smoothing: float, iterations: int) -> Tensor:
    """Weiszfeld's iteration on the vectors themselves."""
    shares = torch.tensor(weights, dtype=torch.float64)
    point = shares @ updates
    for _ in range(iterations):
        closeness = [
            w / max(smoothing, float((point - u).norm())) for w, u in zip(shares.tolist(), updates, strict=True)
        ]
        point = sum(b * u for b, u in zip(closeness, updates, strict=True)) / sum(closeness)
    return point


def centered_clipping(
    updates: Tensor, centre: Tensor, weights: Sequence[float], radius: float, iterations: int
) -> Tensor:
    point = centre
    for _ in range(iterations):
        step = torch.zeros_like(point)
        for w, u in zip(weights, updates, strict=True):
            distance = float((u - point).norm())
            step += w * (u - point) * (min(1.0, radius / distance) if distance else 1.0)
        point = point + step
    return point


def regression_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Of outputs and targets `[n, D]`, value by value in float64, with the mean of the targets taken first."""
    rows = list(zip(outputs.double().T.tolist(), targets.double().T.tolist(), strict=True))
    squares = [sum((f - y) ** 2 for f, y in zip(*row, strict=True)) for row in rows]
    absolutes = [sum(abs(f - y) for f, y in zip(*row, strict=True)) for row in rows]
    spreads = [sum((y - sum(column) / len(column)) ** 2 for y in column) for _, column in rows]
    shares = [1 - square / spread if spread else 0.0 for square, spread in zip(squares, spreads, strict=True)]
    return {
        "mse": sum(squares) / outputs.numel(),
        "mae": sum(absolutes) / outputs.numel(),
        "r2": sum(shares) / len(shares),
    }


def sequence_scores(outputs: Tensor, targets: Tensor, ignored: int) -> dict[str, float]:
    """Of outputs `[..., V]` and targets `[...]`, place by place in float64, without those whose target is `ignored`."""
    rows = outputs.double().reshape(-1, outputs.shape[-1]).tolist()
    losses, hits = [], []
    for row, target in zip(rows, targets.flatten().tolist(), strict=True):
        if target != ignored:
            losses.append(math.log(sum(math.exp(logit) for logit in row)) - row[target])
            hits.append(row.index(max(row)) == target)
    loss = sum(losses) / len(losses)
    return {"loss": loss, "accuracy": sum(hits) / len(hits), "perplexity": math.exp(loss)}
