"""The Prefect server's process: ``python -m flows.server PORT``. Ends with its parent."""

import sys

from flows.lifeline import tie_to_parent


def main(port: int) -> None:
    """Serves the API on loopback, without the user interface."""
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    tie_to_parent()
    main(int(sys.argv[1]))
