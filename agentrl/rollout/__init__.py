"""Running one episode and one group: `episode.run_policy_episode` and `group.run_group` of this package."""
