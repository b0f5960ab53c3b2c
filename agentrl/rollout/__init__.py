"""Running one episode and one group: `episode.run_policy_episode`, `group.run_group`."""
