"""The paper's experiments: pages, pictures and reports in docs/, made from the runs in results/."""
