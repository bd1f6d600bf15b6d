"""ESMM: matrix products that skip the zeros they find at run time."""

from ._core import Context, Format, Pattern, Stats, Verdict, Weights, WeightsInfo
from ._errors import Error, Status
