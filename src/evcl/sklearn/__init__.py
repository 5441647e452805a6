"""`EVCLClassifier` and `EVCLRegressor`, scikit-learn estimators. This needs scikit-learn; `import evcl` does not.

In: arrays or data frames. Out: what scikit-learn's estimators return, from a learner that they hold.
To change: parameters, as scikit-learn's checks allow (`tests/test_sklearn.py`). Fixed: nothing of torch is in a
signature.
"""

from evcl.sklearn.classifier import EVCLClassifier
from evcl.sklearn.estimator import STOCHASTIC, Uncertainty
from evcl.sklearn.regressor import EVCLRegressor, Spread

__all__ = ["STOCHASTIC", "EVCLClassifier", "EVCLRegressor", "Spread", "Uncertainty"]
