"""The split of a cluster's GPUs between training and serving."""
