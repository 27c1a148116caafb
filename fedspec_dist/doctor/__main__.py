import sys

from fedspec_dist.doctor import main
from fedspec_dist.processes.orphans import end_with_launcher, say_interrupted

say_interrupted()
end_with_launcher()
sys.exit(main())
