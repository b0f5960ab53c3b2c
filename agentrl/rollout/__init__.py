"""Running one episode and one group: `rollout.episode.run_policy_episode`, `rollout.group.run_group`."""
