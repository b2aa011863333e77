"""A judge of the demo's generated images: a classifier of scikit-learn's scanned digits.

Its digit is compared with the one that a text names. The judge and the trained model are
independent of each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.sample_data import WORDS, load_scans

_NAMES = {name: word for digit, word in enumerate(WORDS) for name in (word, str(digit))}
_KEPT = 0.25  # share of the scans on which the judge's accuracy is measured


class DigitJudge:
    """A support vector machine over the scans' 8 × 8 values, fitted to three quarters of them.

    `accuracy` is the share of the remaining scans that it classifies correctly.

    Raises:
        DataError: scikit-learn is not installed.
    """

    name = "SVM fitted to real digits"

    def __init__(self) -> None:
        digits = load_scans()
        from sklearn.svm import SVC

        order = np.random.default_rng(0).permutation(len(digits.target))
        kept = int(_KEPT * len(order))
        self._fitted: Any = SVC(gamma=0.001).fit(
            digits.data[order[kept:]], digits.target[order[kept:]]
        )
        self.accuracy: float | None = float(
            (self._fitted.predict(digits.data[order[:kept]]) == digits.target[order[:kept]]).mean()
        )

    def recognise(self, images: Sequence[NDArray[np.uint8]]) -> list[str]:
        """Return the word of the digit in each image [H, W, C] (dark ink on white)."""
        import cv2

        if not images:
            return []
        grey = [
            cv2.resize(image.mean(axis=2), (8, 8), interpolation=cv2.INTER_AREA) for image in images
        ]
        return [
            WORDS[digit]
            for digit in self._fitted.predict(16 - np.stack(grey).reshape(-1, 64) * (16 / 255))
        ]

    def named(self, text: str) -> str | None:
        """Return the word of the digit that a text names; None if it names none, or several."""
        digits = {_NAMES[word] for word in re.findall(r"[a-z]+|\d", text.lower()) if word in _NAMES}
        return digits.pop() if len(digits) == 1 else None
