"""Time of a step: links of a grid, the prediction of a step, and all grids by their predictions."""
