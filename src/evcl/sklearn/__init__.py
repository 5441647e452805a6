"""`EVCLClassifier` and `EVCLRegressor`, scikit-learn estimators. This needs scikit-learn; `import evcl` does not."""

from evcl.sklearn.classifier import EVCLClassifier
from evcl.sklearn.estimator import STOCHASTIC, Uncertainty
from evcl.sklearn.regressor import EVCLRegressor, Spread

__all__ = ["STOCHASTIC", "EVCLClassifier", "EVCLRegressor", "Spread", "Uncertainty"]
