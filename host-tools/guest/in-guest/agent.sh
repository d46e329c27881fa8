# The guest's end of the console. Each line "RUN N SECONDS" runs /job/N.sh (bash, under a timeout) beside whatever else
# runs; its output goes to /job/N.out, and "DONE N STATUS" is answered when it has ended. "STOP" ends the guest.
exec 3<>/dev/hvc0
stty raw -echo <&3
echo "READY $(uname -r) $(cut -d' ' -f1 /proc/uptime)" >&3
while read -r verb number seconds <&3; do
  case $verb in
    RUN) ( timeout -k 5 "$seconds" bash "/job/$number.sh" >"/job/$number.out" 2>&1 </dev/null; echo "DONE $number $?" >&3 ) & ;;
    STOP) break ;;
  esac
done
sync
