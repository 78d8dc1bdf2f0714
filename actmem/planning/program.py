"""A mixed-integer linear program, built row by row and solved with HiGHS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

_GOOD_ENOUGH = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveTarget)


@dataclass(frozen=True)
class Solution:
    """Values of the variables and the objective; `reduced` costs of the variables where none had to be whole.
    `is_optimal`: within the gap, or at the target, that was asked for."""

    values: np.ndarray
    objective: float
    reduced: np.ndarray
    is_optimal: bool


class Program:
    """Minimise the sum of costs times variables, under rows ``low <= sum of coefficients times variables <= high``."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lows: list[float] = []
        self._highs: list[float] = []
        self._whole: list[bool] = []
        self.rows: list[tuple[Mapping[int, float], float, float]] = []

    def variable(self, cost: float = 0.0, *, low: float = 0.0, high: float = math.inf, whole: bool = False) -> int:
        """A new variable; returns its index."""
        self._costs.append(cost)
        self._lows.append(low)
        self._highs.append(high)
        self._whole.append(whole)
        return len(self._costs) - 1

    def row(self, coefficients: Mapping[int, float], *, low: float = -math.inf, high: float = math.inf) -> int:
        """A new row; returns its index."""
        self.rows.append((coefficients, low, high))
        return len(self.rows) - 1

    def solve(
        self,
        *,
        relaxed: bool = False,
        gap: float = 0.0,
        seconds: float = math.inf,
        target: float = -math.inf,
        most_nodes: int | None = None,
        fixed: Mapping[int, float] | None = None,
    ) -> Solution | None:
        """The best solution, or ``None`` where none is found. `relaxed` lets whole variables take any value; else the
        search stops within `gap` of the bound, an absolute one, at a solution that reaches the `target`, or after
        `seconds` or `most_nodes` of its tree. `fixed` variables have only the value that is given for them."""
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "log_to_console": False,
            "threads": 1,
            "random_seed": 0,
            "mip_abs_gap": gap,
            "mip_rel_gap": 0.0,
            "time_limit": seconds,
            "objective_target": target,
        }
        if most_nodes is not None:
            options["mip_max_nodes"] = most_nodes
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model(relaxed, fixed or {}))
        solver.run()
        status = solver.getModelStatus()
        found = solver.getSolution()
        info = solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible or info.primal_solution_status != 2:
            return None
        return Solution(
            values=np.array(found.col_value),
            objective=info.objective_function_value,
            reduced=np.array(found.col_dual),
            is_optimal=status in _GOOD_ENOUGH,
        )

    def _model(self, relaxed: bool, fixed: Mapping[int, float]) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._costs), len(self.rows)
        model.col_cost_ = np.array(self._costs)
        model.col_lower_ = np.array([fixed.get(index, low) for index, low in enumerate(self._lows)])
        model.col_upper_ = np.array([fixed.get(index, high) for index, high in enumerate(self._highs)])
        model.row_lower_ = np.array([low for _, low, _ in self.rows])
        model.row_upper_ = np.array([high for _, _, high in self.rows])
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [] if relaxed else [kinds[whole] for whole in self._whole]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row) for row, _, _ in self.rows)])
        matrix.index_ = np.array([index for row, _, _ in self.rows for index in row], dtype=np.int32)
        matrix.value_ = np.array([value for row, _, _ in self.rows for value in row.values()], dtype=float)
        return model
