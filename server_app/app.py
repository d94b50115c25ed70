"""The plain Flower ServerApp: take the job from the run config and drive it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedplat.job import Job
from fedplat.rundir import RunDirectory, new_run_path
from fedplat.wire import JOB_KEY
from server_app.run import start_run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    job = Job.from_canonical(str(context.run_config.get(JOB_KEY, "")))
    start_run(job, grid, RunDirectory.create(new_run_path(job), job), where="flower")
