"""The convolutional network of images_over_the_network.py. Silos approve it by the hash of this
file's bytes.
"""

from torch import nn


def digits_cnn(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, outputs),
        ),
    )
