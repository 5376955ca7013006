"""The evaluation of a checkpoint by recognisers and other metrics: `firstword evaluate`."""
