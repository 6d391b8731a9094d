"""The paper's experiments, one file for each; they need the extra ``bestresponse[experiments]``."""
