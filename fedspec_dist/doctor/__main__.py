import sys

from fedspec_dist.distributed.orphans import end_with_launcher, say_interrupted
from fedspec_dist.doctor import main

say_interrupted()
end_with_launcher()
sys.exit(main())
