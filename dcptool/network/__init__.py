"""What a network is: models, channel graph, surgery, cost, artifact."""
