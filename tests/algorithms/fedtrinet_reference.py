"""FedTriNet in float64 NumPy, written from its description, on networks of one or two layers."""

import dataclasses

import numpy as np
from numpy_reference import CLASSES, flat, softmax


def layers(weights):
    """(kernel, bias) of each layer."""
    return list(zip(weights[::2], weights[1::2], strict=True))


def hidden_and_logits(weights, x):
    """What each layer gets, and the logits; tanh between the layers."""
    values = [flat(x)]
    for number, (kernel, bias) in enumerate(layers(weights)):
        y = values[-1] @ kernel + bias
        values.append(np.tanh(y) if number < len(weights) // 2 - 1 else y)
    return values[:-1], values[-1]


def probabilities(weights, x):
    return softmax(hidden_and_logits(weights, x)[1])


def gradients(weights, x, y):
    """Of the mean cross-entropy, in the order of the weights; zeros without an image."""
    if len(y) == 0:
        return [np.zeros_like(w) for w in weights]
    inputs, logits = hidden_and_logits(weights, x)
    error = (softmax(logits) - np.eye(CLASSES)[y]) / len(y)
    found = []
    for value, (kernel, _) in zip(reversed(inputs), reversed(layers(weights)), strict=True):
        found = [value.T @ error, error.sum(axis=0), *found]
        error = (error @ kernel.T) * (1 - value**2)
    return found


@dataclasses.dataclass
class FedTriNet:
    """Server and clients together; names as in `FedTriNetConfig`.

    `shared` is the number of leading weights in the first layers.
    """

    weights: list
    shared: int
    warmup_rounds: int
    start_from: str
    refresh_mean: bool
    hold: int = 10
    decay: float = 0.02
    end: int = 35
    final: float = 0.5
    scale: float = 2.8
    t1: int = 10
    t2: int = 30
    full_weight: float = 0.5
    lr: float = 0.3
    momentum: float = 0.0
    uniform: bool = True

    def __post_init__(self):
        self.weights = [np.float64(np.float32(w)) for w in self.weights]
        self.own, self.mean, self.round_num = {}, None, 0
        self.margin = np.inf  # How near a vote came to the threshold.

    def theta(self, r):
        if r < self.hold:
            return self.scale * self.mean
        if r < self.end:
            return self.scale * self.mean * (1 - self.decay * r)
        return self.scale * self.mean * self.final

    def alpha(self, r):
        if r >= self.t2:
            return self.full_weight
        if r < self.t1:
            return 0.0
        return self.full_weight * (r - self.t1) / (self.t2 - self.t1)

    def sgd(self, weights, steps, frozen=0):
        """`steps`: functions from weights to gradients; the first `frozen` weights stay."""
        velocity = [np.zeros_like(w) for w in weights]
        for step in steps:
            velocity = [self.momentum * v + g for v, g in zip(velocity, step(weights), strict=True)]
            weights = [
                w if number < frozen else w - self.lr * v
                for number, (w, v) in enumerate(zip(weights, velocity, strict=True))
            ]
        return weights

    def client(self, number, labeled, unlabeled, hidden=None):
        """Returns the trained weights, r_k, (sum, count) behind m, and counts of the vote."""
        r = self.round_num - self.warmup_rounds
        alpha = self.alpha(r) if r >= 0 else 0.0
        labels = alpha > 0 and self.mean is not None
        w = self.weights
        own = self.own.get(number, w)
        measures = r >= -1 and (self.refresh_mean or self.mean is None)
        largest = [probabilities(w, x).max(axis=-1) for x in unlabeled if measures]
        sent = (sum(p.sum() for p in largest), sum(p.size for p in largest))

        spliced = [*w[: self.shared], *own[self.shared :]]
        on_labels = [lambda ws, x=x, y=y: gradients(ws, x, y) for x, y in labeled]
        spliced = self.sgd(spliced, on_labels, frozen=self.shared)
        start = spliced if r >= 0 and self.start_from == "spliced" else w

        used = sum(len(y) for _, y in labeled)
        voted = kept = right = 0
        steps = []
        for number_of_step in range(max(len(labeled), len(unlabeled) * labels)):
            parts = []
            if number_of_step < len(labeled):
                parts.append((1.0, *labeled[number_of_step]))
            if labels and number_of_step < len(unlabeled):
                x = unlabeled[number_of_step]
                q = sum(probabilities(player, x) for player in (own, w, spliced))
                mask = q.max(axis=-1) >= self.theta(r)
                self.margin = min(self.margin, np.abs(q.max(axis=-1) - self.theta(r)).min())
                parts.append((alpha, x[mask], q.argmax(axis=-1)[mask]))
                voted, kept = voted + len(x), kept + mask.sum()
                if hidden is not None:
                    right += (q.argmax(axis=-1)[mask] == hidden).sum()

            def step(ws, parts=parts):
                each = [[a * g for g in gradients(ws, x, y)] for a, x, y in parts]
                return [sum(g) for g in zip(*each, strict=True)]

            steps.append(step)
        trained = self.sgd(start, steps)
        return trained, used + kept, sent, (voted, kept, right)

    def round(self, cohort, hidden=None):
        """One round on `{client number: (labeled, unlabeled)}`; returns the counts of the vote."""
        outputs, broken = {}, 0
        for number, data in cohort.items():
            with np.errstate(all="ignore"):
                output = self.client(number, *data, hidden)
            if all(np.isfinite(w).all() for w in output[0]):
                outputs[number] = output
            else:
                broken += 1
        shares = {
            n: float(used > 0) if self.uniform else used for n, (_, used, _, _) in outputs.items()
        }
        if sum(shares.values()) > 0:
            measured = np.sum([sent for _, _, sent, _ in outputs.values()], axis=0)
            self.weights = [
                sum(shares[n] * output[0][i] for n, output in outputs.items())
                / sum(shares.values())
                for i in range(len(self.weights))
            ]
            if measured[1] > 0:
                self.mean = measured[0] / measured[1]
        for number, (trained, used, _, _) in outputs.items():
            if used > 0:
                self.own[number] = trained
        self.round_num += 1
        votes = np.sum([counts for _, _, _, counts in outputs.values()], axis=0)
        return votes, sum(used for _, used, _, _ in outputs.values()), broken
