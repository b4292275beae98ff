import subprocess
import sys


def test_the_scheduler_starts_without_torch() -> None:
    """Importing torch takes seconds; with workers of their own the scheduler never needs it."""
    program = (
        "import sys, dspark_services.scheduler.__main__, dspark_services.supervisor\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
